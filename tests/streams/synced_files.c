/* Preloaded into a Redis server: writes down how much of each file the disk has, and can make the disk late.

   SYNCED_FILES names a folder. In it are

     synced   a line for each sync that the disk has done: "sync", the file's size and its path, between tabs; one for
              each rename: "rename" and both paths; one for each sync that "late" or "stuck" met: that word, size and
              path. A sync's line is there before the server hears of the sync;
     late     while it exists, a sync says that it is done, and is not;
     stuck    while it exists, a sync doesn't end.

   A size is taken before the sync: what is written meanwhile need not be on the disk. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { PAUSE_US = 1000 };

static void inside(char *path, const char *name)
{
    const char *folder = getenv("SYNCED_FILES");
    snprintf(path, PATH_MAX, "%s/%s", folder ? folder : ".", name);
}

static int exists(const char *name)
{
    char path[PATH_MAX];
    inside(path, name);
    return access(path, F_OK) == 0;
}

/* One write to the end of the file: lines of several threads don't mix. */
static void note(const char *kind, const char *first, const char *second)
{
    char path[PATH_MAX], line[2 * PATH_MAX + 32];
    inside(path, "synced");
    int length = snprintf(line, sizeof line, "%s\t%s\t%s\n", kind, first, second);
    int file = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
    if (file < 0 || length >= (int)sizeof line || write(file, line, (size_t)length) != length) abort();
    close(file);
}

static void note_size(const char *kind, int file, const struct stat *state)
{
    char link[64], path[PATH_MAX], size[32];
    if (!S_ISREG(state->st_mode)) return;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return;
    path[length] = 0;
    snprintf(size, sizeof size, "%lld", (long long)state->st_size);
    note(kind, size, path);
}

static int sync_file(int file, long call)
{
    struct stat state;
    if (fstat(file, &state) != 0) return -1;
    if (exists("late")) {
        note_size("late", file, &state);
        return 0;
    }
    if (exists("stuck")) {
        note_size("stuck", file, &state);
        while (exists("stuck")) usleep(PAUSE_US);
    }
    int result = (int)syscall(call, file);
    if (result == 0) note_size("sync", file, &state);
    return result;
}

int fsync(int file)
{
    return sync_file(file, SYS_fsync);
}

int fdatasync(int file)
{
    return sync_file(file, SYS_fdatasync);
}

/* A file takes what the disk has of it to its new name. */
int rename(const char *before, const char *after)
{
    char from[PATH_MAX], to[PATH_MAX];
    int known = realpath(before, from) != NULL;
    int result = renameat(AT_FDCWD, before, AT_FDCWD, after);
    int error = errno;
    if (result == 0 && known && realpath(after, to) != NULL) note("rename", from, to);
    errno = error;
    return result;
}
