import pagestream_cli
import pagestream_cli.supervisor


def test_the_public_names() -> None:
    assert pagestream_cli.__all__ == ["CliError"]
    assert pagestream_cli.supervisor.__all__ == ["PartSpec", "PartState", "RestartPolicy", "Standby", "Supervisor"]
    for package in (pagestream_cli, pagestream_cli.supervisor):
        assert all(hasattr(package, name) for name in package.__all__)
