"""All laws on one trace, as a table, JSON and a plot: what `pagestream simulate` runs."""
