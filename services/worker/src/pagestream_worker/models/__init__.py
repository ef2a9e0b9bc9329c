"""One engine process, several models: which it serves, and how it changes from one to another."""
