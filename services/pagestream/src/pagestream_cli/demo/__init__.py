"""`pagestream demo`: streams of a deployment on this machine, whose processes are killed meanwhile."""
