"""What is neither side: the model directory, the sweeper, quarantine and queue figures."""
