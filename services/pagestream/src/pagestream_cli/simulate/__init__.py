"""`pagestream simulate`: the command of `pagestream_simulator`."""
