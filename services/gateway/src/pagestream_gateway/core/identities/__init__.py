"""Who a caller is: what its credentials say, checked."""
