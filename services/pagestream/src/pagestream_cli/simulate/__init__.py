"""`pagestream simulate`: a trace through the scaling law and a queueing model of engines."""
