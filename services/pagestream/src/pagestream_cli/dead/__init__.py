"""`pagestream dead`: requests that engines died of."""
