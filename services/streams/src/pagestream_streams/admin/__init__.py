"""What engines and gateways share: the broker, the model directory, the sweeper, quarantine and queue figures."""
