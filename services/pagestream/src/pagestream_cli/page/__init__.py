"""What `pagestream serve --demo` adds to the page at `/`."""
