from pagestream_gateway.metrics import Metrics


def test_exposition() -> None:
    metrics = Metrics()
    metrics.streams_open, metrics.tokens_out = 2, 7
    metrics.count_request("chat", "ok")
    metrics.count_request("chat", "ok")
    lines = metrics.render().splitlines()
    assert "pagestream_gateway_streams_open 2" in lines
    assert "pagestream_gateway_tokens_total 7" in lines
    assert 'pagestream_gateway_requests_total{api="chat",outcome="ok"} 2' in lines
    assert lines.count("# TYPE pagestream_gateway_requests_total counter") == 1
