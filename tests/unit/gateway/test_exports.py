"""The package's public surface."""

import subprocess
import sys

import pagestream_gateway


def test_exported_names() -> None:
    assert pagestream_gateway.__all__ == [
        "GatewayError",
        "Ports",
        "Settings",
        "SettingsError",
        "StartupError",
        "load_settings",
        "running_gateway",
        "serve",
    ]
    assert all(hasattr(pagestream_gateway, name) for name in pagestream_gateway.__all__)


def test_the_process_never_loads_a_model_library() -> None:
    program = (
        "import sys, pagestream_gateway.__main__\n"
        "never = {'torch', 'transformers', 'triton', 'pagestream_kernels', 'pagestream_engine'}\n"
        "print(*sorted(never & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == ""
