"""In which order free blocks are used anew: the part of the prefix cache that decides what it keeps."""
