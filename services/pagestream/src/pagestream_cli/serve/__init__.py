"""`pagestream serve`: all parts on one machine."""
