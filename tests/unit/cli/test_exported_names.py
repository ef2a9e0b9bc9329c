import pagestream_cli
import pagestream_cli.client
import pagestream_cli.supervisor


def test_the_public_names() -> None:
    assert pagestream_cli.__all__ == ["CliError"]
    assert pagestream_cli.client.__all__ == ["Endpoint", "find_endpoint", "show_answer", "stream_answer"]
    assert pagestream_cli.supervisor.__all__ == ["PartSpec", "PartState", "RestartPolicy", "Supervisor"]
    for package in (pagestream_cli, pagestream_cli.client, pagestream_cli.supervisor):
        assert all(hasattr(package, name) for name in package.__all__)
