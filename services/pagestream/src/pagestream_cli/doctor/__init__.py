"""`pagestream doctor`: what this machine has, what is wrong, and what to do."""
