"""`pagestream bench`: load against a running server, and what it felt like."""
