// The logs that an engine writes: their entries, the digests that chain these, and the arguments of append.lua.
//
// What pagestream_worker/logs/token_logs.py does for one log at a time, for all logs in one pass over a step's tokens.
// The formats are those of pagestream_streams: protocol/digests.py (a link), protocol/entries.py (an entry's values),
// scripts/append.lua (ARGV[2]) and records.proto (WakeUp). Called through ctypes with the interpreter's lock held, so that
// no two calls run at once. No function throws: each returns FAILED where memory is short, or for arguments that do not
// fit each other.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <new>
#include <string>
#include <vector>

namespace {

constexpr int64_t FAILED = -1;
constexpr int PACKED_ENTRIES = 16;                // of a part; python_logs.py has the same
constexpr int TAIL_ENTRIES = 2 * PACKED_ENTRIES;  // then the first half becomes a part
constexpr int64_t PART_BYTES = 128;               // of a part's objects, beside its bytes
constexpr int64_t MOST_BYTES = 1 << 24;           // of one value of an entry: the offsets in a tail have 32 bits
constexpr int DIGEST_CHARS = 16;
constexpr int BLOCK_BYTES = 64;
constexpr int LENGTH_BYTES = 8;  // of the message's length, at the end of its last block
constexpr int LANES = 4;

// -- SHA-1 (FIPS 180-4, 6.1) of one message, or of four at once in vectors --

using Lanes = uint32_t __attribute__((vector_size(4 * LANES)));

template <class Word>
inline Word rotated(Word x, int bits) {
  return (x << bits) | (x >> (32 - bits));
}

template <class Word>
void compress(Word (&state)[5], Word (&w)[16]) {
  Word a = state[0], b = state[1], c = state[2], d = state[3], e = state[4];
  auto round = [&](int t, Word f, uint32_t k) {
    if (t >= 16) {
      w[t & 15] = rotated(w[(t - 3) & 15] ^ w[(t - 8) & 15] ^ w[(t - 14) & 15] ^ w[t & 15], 1);
    }
    Word next = rotated(a, 5) + f + e + w[t & 15] + k;
    e = d;
    d = c;
    c = rotated(b, 30);
    b = a;
    a = next;
  };
  for (int t = 0; t < 20; ++t) round(t, d ^ (b & (c ^ d)), 0x5a827999u);
  for (int t = 20; t < 40; ++t) round(t, b ^ c ^ d, 0x6ed9eba1u);
  for (int t = 40; t < 60; ++t) round(t, (b & c) | (d & (b | c)), 0x8f1bbcdcu);
  for (int t = 60; t < 80; ++t) round(t, b ^ c ^ d, 0xca62c1d6u);
  state[0] += a;
  state[1] += b;
  state[2] += c;
  state[3] += d;
  state[4] += e;
}

constexpr uint32_t INITIAL[5] = {0x67452301u, 0xefcdab89u, 0x98badcfeu, 0x10325476u, 0xc3d2e1f0u};

inline uint32_t big_endian(const unsigned char* bytes) {
  return uint32_t(bytes[0]) << 24 | uint32_t(bytes[1]) << 16 | uint32_t(bytes[2]) << 8 | bytes[3];
}

// Sixteen hexadecimal digits: the first two words of a hash.
void write_digest(char* digest, uint32_t first, uint32_t second) {
  uint64_t bits = uint64_t(first) << 32 | second;
  for (int i = 0; i < DIGEST_CHARS; ++i) digest[i] = "0123456789abcdef"[bits >> (60 - 4 * i) & 15];
}

// Add the end of a message of `length` bytes to its last block, which has `used` of them.
void pad(unsigned char* block, size_t used, uint64_t length) {
  block[used] = 0x80;
  std::memset(block + used + 1, 0, BLOCK_BYTES - LENGTH_BYTES - used - 1);
  for (int i = 0; i < LENGTH_BYTES; ++i) block[BLOCK_BYTES - 1 - i] = uint8_t(length * 8 >> 8 * i);
}

void hash_block(uint32_t (&state)[5], const unsigned char* block) {
  uint32_t w[16];
  for (int i = 0; i < 16; ++i) w[i] = big_endian(block + 4 * i);
  compress(state, w);
}

void hash(const std::string& message, char* digest) {
  uint32_t state[5];
  std::copy(std::begin(INITIAL), std::end(INITIAL), state);
  const auto* bytes = reinterpret_cast<const unsigned char*>(message.data());
  size_t left = message.size();
  for (; left >= BLOCK_BYTES; left -= BLOCK_BYTES, bytes += BLOCK_BYTES) hash_block(state, bytes);
  unsigned char block[BLOCK_BYTES] = {};
  std::memcpy(block, bytes, left);
  if (left >= BLOCK_BYTES - LENGTH_BYTES) {
    block[left] = 0x80;
    hash_block(state, block);
    std::memset(block, 0, sizeof block);
    for (int i = 0; i < LENGTH_BYTES; ++i) block[BLOCK_BYTES - 1 - i] = uint8_t(uint64_t(message.size()) * 8 >> 8 * i);
  } else {
    pad(block, left, message.size());
  }
  hash_block(state, block);
  write_digest(digest, state[0], state[1]);
}

// Four messages of one padded block each.
void hash_lanes(const unsigned char (&blocks)[LANES][BLOCK_BYTES], char* const (&digests)[LANES]) {
  Lanes state[5], w[16];
  for (int i = 0; i < 5; ++i) state[i] = Lanes{} + INITIAL[i];
  for (int i = 0; i < 16; ++i) {
    for (int lane = 0; lane < LANES; ++lane) w[i][lane] = big_endian(blocks[lane] + 4 * i);
  }
  compress(state, w);
  for (int lane = 0; lane < LANES; ++lane) write_digest(digests[lane], state[0][lane], state[1][lane]);
}

// -- a log --

struct Text {
  const char* data;
  int64_t length;
};

struct Digest {
  char chars[DIGEST_CHARS];
  int length = 0;  // 0 at the start of a log
};

// Before an entry's choice, value, text and extra.
struct Header {
  uint32_t choice, value, text, extra;  // lengths in bytes
  char kind;
  char extra_is_bytes;
  char digest[DIGEST_CHARS];
  char unused[2];
};
static_assert(sizeof(Header) == 36, "native_logs.py unpacks it");

struct Entry {
  Header header;
  const char *choice, *value, *text, *extra;
  const char* end;
};

Entry read_entry(const char* at) {
  Entry entry;
  std::memcpy(&entry.header, at, sizeof entry.header);
  entry.choice = at + sizeof entry.header;
  entry.value = entry.choice + entry.header.choice;
  entry.text = entry.value + entry.header.value;
  entry.extra = entry.text + entry.header.text;
  entry.end = entry.extra + entry.header.extra;
  return entry;
}

struct Part {
  int64_t first_index;
  Digest previous;
  std::string packed;

  int64_t num_bytes() const { return int64_t(packed.size()) + PART_BYTES; }
};

struct Log {
  int64_t handle;
  int64_t partition;    // -1: unknown
  int64_t claim_index;  // of the first entry written here
  int64_t next_index;   // of the first entry that is not acknowledged
  int64_t tail_index;   // of the first entry in the tail
  int64_t tokens_from;  // all entries from here on are tokens without logprobs
  int64_t num_taken = 0;
  int64_t num_bytes = 0;
  uint64_t excluded = 0;  // the pass that leaves it out
  bool takes_tokens = true;
  Digest digest, tail_digest;  // of the log, and of the log before the tail
  int num_tail = 0;
  uint32_t offsets[TAIL_ENTRIES + 1] = {0};  // of the entries in the tail, and of its end
  std::string tail;
  std::deque<Part> parts;
  std::string head;        // `"<id>","<epoch>","<nonce>",` of the arguments
  std::string request_id;  // UTF-8

  int64_t end_index() const { return tail_index + num_tail; }
  bool has_pending() const { return next_index < end_index(); }
  int64_t first_kept() const { return parts.empty() ? tail_index : parts.front().first_index; }

  const Digest digest_before(int place) const {
    if (place == 0) return tail_digest;
    Digest before;
    before.length = DIGEST_CHARS;
    std::memcpy(before.chars, read_entry(tail.data() + offsets[place - 1]).header.digest, DIGEST_CHARS);
    return before;
  }

  // Whether what it lacks can go out with the others' tokens: no entry for which append.lua or a reader needs more.
  bool has_plain_pending() const {
    return partition >= 0 && next_index > claim_index && next_index >= tokens_from && next_index >= tail_index;
  }
};

struct Table {
  std::vector<std::unique_ptr<Log>> slots;
  std::vector<uint32_t> free_slots;
  int64_t generation = 0;
  int64_t held_bytes = 0;
  uint64_t pass = 0;

  // What the last call of logs_pending or logs_entries found.
  std::vector<int64_t> handles, others, partitions, counts;
  std::vector<int64_t> values_ends, wake_ends, ends;
  std::string values, wake_ups, entries;

  Log* find(int64_t handle) const {
    uint64_t slot = uint64_t(handle) & 0xffffffffu;
    if (slot >= slots.size()) return nullptr;
    Log* log = slots[slot].get();
    return log != nullptr && log->handle == handle ? log : nullptr;
  }
};

void add_entry(Log& log, char kind, Text choice, Text value, Text text, Text extra, bool extra_is_bytes) {
  if (log.num_tail == TAIL_ENTRIES) throw std::bad_alloc();  // its memory was short before: `offsets` is full
  Header header{uint32_t(choice.length), uint32_t(value.length), uint32_t(text.length), uint32_t(extra.length),
                kind, char(extra_is_bytes), {}, {}};
  std::memcpy(header.digest, log.digest.chars, DIGEST_CHARS);
  log.tail.append(reinterpret_cast<const char*>(&header), sizeof header);
  for (Text each : {choice, value, text, extra}) log.tail.append(each.data, size_t(each.length));
  log.offsets[++log.num_tail] = uint32_t(log.tail.size());
}

void pack(Table& table, Log& log) {
  if (log.num_tail < TAIL_ENTRIES) return;
  uint32_t size = log.offsets[PACKED_ENTRIES];
  Digest last = log.digest_before(PACKED_ENTRIES);
  log.parts.push_back({log.tail_index, log.tail_digest, log.tail.substr(0, size)});
  int64_t num_bytes = log.parts.back().num_bytes();
  log.num_bytes += num_bytes;
  table.held_bytes += num_bytes;
  log.tail.erase(0, size);
  log.tail_digest = last;
  log.tail_index += PACKED_ENTRIES;
  log.num_tail -= PACKED_ENTRIES;
  for (int i = 0; i <= log.num_tail; ++i) log.offsets[i] = log.offsets[i + PACKED_ENTRIES] - size;
}

// -- numbers, JSON and protobuf --

int write_decimal(char* out, int64_t number) {
  char digits[20];
  int count = 0;
  uint64_t rest = number < 0 ? 0 - uint64_t(number) : uint64_t(number);
  do digits[count++] = char('0' + rest % 10);
  while (rest /= 10);
  if (number < 0) *out++ = '-';
  for (int i = 0; i < count; ++i) out[i] = digits[count - 1 - i];
  return count + (number < 0);
}

void add_decimal(std::string& out, int64_t number) {
  char digits[20];
  out.append(digits, size_t(write_decimal(digits, number)));
}

inline bool is_escaped(unsigned char c) { return c < 0x20 || c == '"' || c == '\\'; }

void add_escaped(std::string& out, unsigned char c) {
  constexpr char SHORT[] = "\"\\\b\f\n\r\t", LETTERS[] = "\"\\bfnrt";
  out += '\\';
  const void* found = std::memchr(SHORT, c, sizeof SHORT - 1);
  if (found != nullptr) {
    out += LETTERS[static_cast<const char*>(found) - SHORT];
  } else {
    out += "u00";
    out += "0123456789abcdef"[c >> 4];
    out += "0123456789abcdef"[c & 15];
  }
}

void add_json(std::string& out, const char* text, uint32_t length) {
  out += '"';
  const char *end = text + length, *copied = text;
  for (const char* at = text; at != end; ++at) {
    if (!is_escaped(static_cast<unsigned char>(*at))) continue;
    out.append(copied, size_t(at - copied));
    add_escaped(out, static_cast<unsigned char>(*at));
    copied = at + 1;
  }
  out.append(copied, size_t(end - copied));
  out += '"';
}

void add_varint(std::string& out, uint64_t number) {
  for (; number >= 0x80; number >>= 7) out += char(number | 0x80);
  out += char(number);
}

int varint_bytes(uint64_t number) {
  int count = 1;
  while (number >>= 7) ++count;
  return count;
}

uint64_t parse_decimal(const char* digits, uint32_t length) {
  uint64_t number = 0;
  for (uint32_t i = 0; i < length; ++i) number = number * 10 + uint64_t(digits[i] - '0');
  return number;
}

// A field of wire type 2 (length-delimited). All field numbers here are below 16: a tag is one byte.
size_t string_bytes(size_t length) { return length == 0 ? 0 : 1 + size_t(varint_bytes(length)) + length; }

void add_string(std::string& out, int field, const char* text, size_t length) {
  if (length == 0) return;
  out += char(field << 3 | 2);
  add_varint(out, length);
  out.append(text, length);
}

// A LogEntry with a token.
void add_log_entry(std::string& out, const Entry& entry) {
  uint64_t choice = parse_decimal(entry.choice, entry.header.choice);
  uint64_t token = parse_decimal(entry.value, entry.header.value);
  size_t size = (choice ? 1 + size_t(varint_bytes(choice)) : 0) + string_bytes(DIGEST_CHARS) +
                string_bytes(entry.header.text) + 1 + size_t(varint_bytes(token));
  out += char(3 << 3 | 2);
  add_varint(out, size);
  if (choice) {
    out += char(1 << 3);
    add_varint(out, choice);
  }
  add_string(out, 2, entry.header.digest, DIGEST_CHARS);
  add_string(out, 3, entry.text, entry.header.text);
  out += char(4 << 3);
  add_varint(out, token);
}

// Add `count` tokens of the tail from `place` on to the arguments of append.lua, and to the wake-ups.
void add_append(Table& table, const Log& log, int place, int count, std::string& slice) {
  Digest before = log.digest_before(place);
  slice.clear();
  add_string(slice, 1, log.request_id.data(), log.request_id.size());
  slice += char(2 << 3);
  add_varint(slice, uint64_t(log.next_index));
  const char* at = log.tail.data() + log.offsets[place];
  for (int i = 0; i < count; ++i) {
    Entry entry = read_entry(at);
    at = entry.end;
    add_log_entry(slice, entry);
  }
  add_string(slice, 4, before.chars, size_t(before.length));
  size_t wakes_before = table.wake_ups.size();
  add_string(table.wake_ups, 1, slice.data(), slice.size());
  table.wake_ends.push_back(int64_t(table.wake_ups.size()));
  table.ends.push_back(log.next_index + count);

  std::string& values = table.values;
  values += log.head;
  add_decimal(values, log.next_index);
  values += ",\"\",";
  add_decimal(values, count);
  values += ',';
  add_decimal(values, int64_t(table.wake_ups.size() - wakes_before));
  at = log.tail.data() + log.offsets[place];
  for (int i = 0; i < count; ++i) {
    Entry entry = read_entry(at);
    at = entry.end;
    values += ",\"t\",";
    add_json(values, entry.choice, entry.header.choice);
    values += ',';
    add_json(values, entry.value, entry.header.value);
    values += ',';
    add_json(values, entry.text, entry.header.text);
    values += ",\"";
    values.append(entry.header.digest, DIGEST_CHARS);
    values += "\",\"\"";
  }
}

// -- one pass over the tokens of a step --

// The tokens of up to four logs, whose links are made together.
class Links {
 public:
  explicit Links(Table& table) : table_(table) {}

  void add(Log& log, int64_t token_id, Text text) {
    for (int i = 0; i < count_; ++i) {
      if (tokens_[i].log == &log) {
        flush();  // its next link needs the one before
        break;
      }
    }
    Token& token = tokens_[count_];
    token.log = &log;
    token.text = text;
    token.num_digits = write_decimal(token.digits, token_id);
    unsigned char* block = blocks_[count_];
    size_t used = size_t(log.digest.length);
    std::memcpy(block, log.digest.chars, used);
    std::memcpy(block + used, ":c:0:t:", 7);
    used += 7;
    std::memcpy(block + used, token.digits, size_t(token.num_digits));
    used += size_t(token.num_digits);
    pad(block, used, used);
    if (++count_ == LANES) flush();
  }

  void flush() {
    char unused[DIGEST_CHARS];
    char* digests[LANES] = {unused, unused, unused, unused};
    for (int i = 0; i < count_; ++i) {
      digests[i] = tokens_[i].log->digest.chars;
      tokens_[i].log->digest.length = DIGEST_CHARS;
    }
    if (count_ > 0) hash_lanes(blocks_, digests);
    for (int i = 0; i < count_; ++i) {
      Token& token = tokens_[i];
      add_entry(*token.log, 't', {"0", 1}, {token.digits, token.num_digits}, token.text, {"", 0}, false);
      ++token.log->num_taken;
      pack(table_, *token.log);
    }
    count_ = 0;
  }

 private:
  struct Token {
    Log* log;
    Text text;
    char digits[20];
    int num_digits;
  };

  Table& table_;
  Token tokens_[LANES];
  unsigned char blocks_[LANES][BLOCK_BYTES] = {};
  int count_ = 0;
};

template <class Action>
int64_t guarded(Action action) {
  try {
    return action();
  } catch (...) {  // std::bad_alloc, std::length_error: nothing may be thrown into the interpreter
    return FAILED;
  }
}

}  // namespace

extern "C" {

void* logs_new() { return new (std::nothrow) Table; }

void logs_delete(void* table) { delete static_cast<Table*>(table); }

int64_t logs_held_bytes(const void* table) { return static_cast<const Table*>(table)->held_bytes; }

// Returns the log's handle, above 0.
int64_t logs_open(void* pointer, int64_t partition, int64_t next_index, const char* digest, int64_t digest_length,
                  const char* head, int64_t head_length, const char* request_id, int64_t id_length) {
  return guarded([&]() -> int64_t {
    auto& table = *static_cast<Table*>(pointer);
    if (digest_length != 0 && digest_length != DIGEST_CHARS) return FAILED;
    auto log = std::make_unique<Log>();
    log->partition = partition;
    log->claim_index = log->next_index = log->tail_index = log->tokens_from = next_index;
    std::memcpy(log->digest.chars, digest, size_t(digest_length));
    log->digest.length = int(digest_length);
    log->tail_digest = log->digest;
    log->head.assign(head, size_t(head_length));
    log->request_id.assign(request_id, size_t(id_length));
    if (table.free_slots.empty()) {
      table.slots.emplace_back();
      table.free_slots.reserve(table.slots.capacity());
      table.free_slots.push_back(uint32_t(table.slots.size() - 1));
    }
    uint32_t slot = table.free_slots.back();
    table.free_slots.pop_back();
    log->handle = ++table.generation << 32 | slot;
    table.slots[slot] = std::move(log);
    return table.slots[slot]->handle;
  });
}

void logs_close(void* pointer, int64_t handle) {
  auto& table = *static_cast<Table*>(pointer);
  Log* log = table.find(handle);
  if (log == nullptr) return;
  uint32_t slot = uint32_t(uint64_t(handle) & 0xffffffffu);
  table.held_bytes -= log->num_bytes;
  table.slots[slot].reset();
  table.free_slots.push_back(slot);  // within its capacity, see logs_open
}

// Write an entry of any kind. After a finish or the end, the log takes no more tokens.
int64_t logs_write(void* pointer, int64_t handle, char kind, const char* choice, int64_t choice_length,
                   const char* value, int64_t value_length, const char* text, int64_t text_length, const char* extra,
                   int64_t extra_length, int extra_is_bytes) {
  return guarded([&]() -> int64_t {
    auto& table = *static_cast<Table*>(pointer);
    Log* log = table.find(handle);
    if (log == nullptr || std::max({choice_length, value_length, text_length, extra_length}) > MOST_BYTES) {
      return FAILED;
    }
    std::string message(log->digest.chars, size_t(log->digest.length));
    if (kind == 'e') {
      message += ":end:";
    } else {
      message.append(":c:").append(choice, size_t(choice_length)).append({':', kind, ':'});
    }
    message.append(value, size_t(value_length));
    hash(message, log->digest.chars);
    log->digest.length = DIGEST_CHARS;
    add_entry(*log, kind, {choice, choice_length}, {value, value_length}, {text, text_length}, {extra, extra_length},
              extra_is_bytes != 0);
    if (kind != 't' || extra_length != 0 || extra_is_bytes) log->tokens_from = log->end_index();
    if (kind != 't') log->takes_tokens = false;
    pack(table, *log);
    return 0;
  });
}

// Write a token of choice 0 to each of `count` logs; those that have gone or ended are passed over.
int64_t logs_take(void* pointer, int64_t count, const int64_t* handles, const int32_t* token_ids,
                  const int32_t* text_lengths, const char* text, int64_t text_length) {
  return guarded([&]() -> int64_t {
    auto& table = *static_cast<Table*>(pointer);
    int64_t sum = 0;
    for (int64_t i = 0; i < count; ++i) {
      if (text_lengths[i] < 0 || text_lengths[i] > MOST_BYTES) return FAILED;
      sum += text_lengths[i];
    }
    if (sum != text_length) return FAILED;
    Links links(table);
    for (int64_t i = 0; i < count; ++i) {
      Log* log = table.find(handles[i]);
      if (log != nullptr && log->takes_tokens) links.add(*log, token_ids[i], {text, text_lengths[i]});
      text += text_lengths[i];
    }
    links.flush();
    return 0;
  });
}

// What logs_pending found; valid until the next call of a function of this table.
struct Pending {
  int64_t num_logs, num_partitions, num_others;
  const int64_t *handles, *wake_ends, *ends;         // of each log with plain tokens, by partition; its index after
  const int64_t *partitions, *counts, *values_ends;  // of each partition
  const int64_t* others;                             // handles of the logs with other pending entries
  const char *values, *wake_ups;
  int64_t wake_bytes;
};

int64_t logs_pending(void* pointer, int64_t limit, const int64_t* excluded, int64_t num_excluded, Pending* found) {
  return guarded([&]() -> int64_t {
    auto& table = *static_cast<Table*>(pointer);
    if (limit < 1) return FAILED;
    uint64_t pass = ++table.pass;
    for (int64_t i = 0; i < num_excluded; ++i) {
      Log* log = table.find(excluded[i]);
      if (log != nullptr) log->excluded = pass;
    }
    for (auto* each : {&table.handles, &table.others, &table.partitions, &table.counts, &table.values_ends,
                       &table.wake_ends, &table.ends}) {
      each->clear();
    }
    table.values.clear();
    table.wake_ups.clear();
    std::vector<Log*> plain;
    bool is_sorted = true;
    for (auto& slot : table.slots) {
      Log* log = slot.get();
      if (log == nullptr || !log->has_pending() || log->excluded == pass) continue;
      if (log->has_plain_pending()) {
        is_sorted = is_sorted && (plain.empty() || plain.back()->partition <= log->partition);
        plain.push_back(log);
      } else {
        table.others.push_back(log->handle);
      }
    }
    if (!is_sorted) {
      std::stable_sort(plain.begin(), plain.end(), [](Log* a, Log* b) { return a->partition < b->partition; });
    }
    std::string slice;
    for (size_t i = 0; i < plain.size(); ++i) {
      Log& log = *plain[i];
      bool is_first = i == 0 || plain[i - 1]->partition != log.partition;
      if (is_first) {
        table.partitions.push_back(log.partition);
        table.counts.push_back(0);
      }
      table.values += is_first ? '[' : ',';
      ++table.counts.back();
      table.handles.push_back(log.handle);
      int place = int(log.next_index - log.tail_index);
      add_append(table, log, place, int(std::min<int64_t>(limit, log.num_tail - place)), slice);
      if (i + 1 == plain.size() || plain[i + 1]->partition != log.partition) {
        table.values += ']';
        table.values_ends.push_back(int64_t(table.values.size()));
      }
    }
    *found = {int64_t(table.handles.size()), int64_t(table.partitions.size()), int64_t(table.others.size()),
              table.handles.data(), table.wake_ends.data(), table.ends.data(), table.partitions.data(), table.counts.data(),
              table.values_ends.data(), table.others.data(), table.values.data(), table.wake_ups.data(),
              int64_t(table.wake_ups.size())};
    return 0;
  });
}

// Continue logs from these indices. Returns how many of them have more to append.
int64_t logs_acknowledge(void* pointer, int64_t count, const int64_t* handles, const int64_t* next_indexes) {
  auto& table = *static_cast<Table*>(pointer);
  int64_t more = 0;
  for (int64_t i = 0; i < count; ++i) {
    Log* log = table.find(handles[i]);
    if (log == nullptr) continue;
    log->next_index = next_indexes[i];
    more += log->has_pending();
  }
  return more;
}

// What logs_entries found; valid until the next call of a function of this table.
struct Entries {
  int64_t count;
  const char* packed;  // Header, choice, value, text and extra of each
  int64_t num_bytes;
  Digest previous;  // of the log before the first one
};

// The next entries of a log to append: at most `limit`, or one more that is a finish.
int64_t logs_entries(void* pointer, int64_t handle, int64_t limit, Entries* found) {
  return guarded([&]() -> int64_t {
    auto& table = *static_cast<Table*>(pointer);
    Log* log = table.find(handle);
    if (log == nullptr || limit < 1 || log->next_index < log->first_kept()) return FAILED;
    table.entries.clear();
    int64_t index = log->next_index, count = 0;
    bool has_previous = false;
    Digest previous;
    auto add_from = [&](const std::string& packed, int64_t first_index, int64_t size, const Digest& before) {
      Digest last = before;
      const char* at = packed.data();
      for (int64_t i = first_index; i < first_index + size && count <= limit; ++i) {
        Entry entry = read_entry(at);
        if (i >= index) {
          if (!has_previous) previous = last;
          has_previous = true;
          if (count == limit && entry.header.kind != 'f') {
            count = limit + 1;  // full
            return;
          }
          table.entries.append(at, size_t(entry.end - at));
          ++found->count;
          ++count;
        }
        std::memcpy(last.chars, entry.header.digest, DIGEST_CHARS);
        last.length = DIGEST_CHARS;
        at = entry.end;
      }
    };
    found->count = 0;
    if (index < log->tail_index) {
      size_t part = size_t((index - log->parts.front().first_index) / PACKED_ENTRIES);
      for (; part < log->parts.size() && count <= limit; ++part) {
        const Part& each = log->parts[part];
        add_from(each.packed, each.first_index, PACKED_ENTRIES, each.previous);
      }
    }
    if (count <= limit) add_from(log->tail, log->tail_index, log->num_tail, log->tail_digest);
    if (!has_previous) previous = log->digest;
    found->packed = table.entries.data();
    found->num_bytes = int64_t(table.entries.size());
    found->previous = previous;
    return 0;
  });
}

// Drop the oldest part of a log; returns 0 where none is acknowledged.
int64_t logs_drop_oldest(void* pointer, int64_t handle) {
  auto& table = *static_cast<Table*>(pointer);
  Log* log = table.find(handle);
  if (log == nullptr || log->parts.empty()) return 0;
  int64_t end = log->parts.size() > 1 ? log->parts[1].first_index : log->tail_index;
  if (end > log->next_index) return 0;
  int64_t num_bytes = log->parts.front().num_bytes();
  log->num_bytes -= num_bytes;
  table.held_bytes -= num_bytes;
  log->parts.pop_front();
  return 1;
}

struct State {
  int64_t next_index, end_index, first_kept, num_bytes, num_taken;
};

// FAILED for a log that has gone.
int64_t logs_state(const void* pointer, int64_t handle, State* state) {
  const Log* log = static_cast<const Table*>(pointer)->find(handle);
  if (log == nullptr) return FAILED;
  *state = {log->next_index, log->end_index(), log->first_kept(), log->num_bytes, log->num_taken};
  return 0;
}

}  // extern "C"
