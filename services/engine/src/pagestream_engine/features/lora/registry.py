"""The adapters that an engine knows by name, checked against its model. This module imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pagestream_engine.config import AdapterConfig
from pagestream_engine.errors import AdapterError, AdapterFileError, UnsupportedAdapter
from pagestream_engine.request import Adapter, LoRARequest


class AdapterRegistry:
    """Adapters by name. Their matrices are read when a request first wants them.

    `load` reads files, and may be called on another thread than the engine's; `pinned` reads none.
    """

    def __init__(self, folder: Path, config: AdapterConfig) -> None:
        """`folder` is the model's."""
        self._folder = folder
        self._config = config
        self._adapters: dict[str, Adapter] = {}

    @property
    def is_enabled(self) -> bool:
        """Whether the engine takes adapters."""
        return self._config.enable_lora

    def pinned(self, name: str, folder: str, revision: str) -> Adapter:
        """Return an adapter of a known revision. Its files are checked when they are read, which ends the requests
        that name it where they can't be used.

        Raises:
            UnsupportedAdapter: adapters are off.
        """
        if not self.is_enabled:
            raise UnsupportedAdapter(f"adapter {name}: given to an engine without adapters, expected enable_lora")
        return Adapter(name, folder, revision)

    def load(self, name: str, folder: str | Path) -> Adapter:
        """Check an adapter's files, and know it by a name from now on, in place of an earlier one.

        Args:
            name: that requests give.
            folder: with `adapter_config.json` and `adapter_model.safetensors`.

        Raises:
            AdapterError: it can't be used; the message says why.
        """
        if not self.is_enabled:
            raise UnsupportedAdapter(f"adapter {name}: given to an engine without adapters, expected enable_lora")
        # Where torch is loaded anyway: a core whose executor is another process need not.
        from pagestream_engine.features.lora.files import adaptable_modules, open_adapter
        from pagestream_engine.models.registry import open_model

        source = open_model(self._folder)
        if source.weights is None:
            raise UnsupportedAdapter(f"adapter {name}: given for {source.info.architecture}, which takes no adapters")
        modules = adaptable_modules(source.weights)
        try:
            adapter = open_adapter(name, Path(folder), modules, self._config.max_lora_rank)
        except AdapterError:
            raise
        except Exception as error:  # a file of a form that nobody thought of is the end of its requests alone
            raise AdapterFileError(f"{folder}: malformed: {type(error).__name__}: {error}") from error
        self._adapters[name] = adapter
        return adapter

    def take(self, request: LoRARequest) -> Adapter:
        """Return the adapter of a request, loaded unless its name and path are known; raises as `load`."""
        known = self._adapters.get(request.lora_name)
        if known is not None and known.folder == request.lora_path:
            return known
        return self.load(request.lora_name, request.lora_path)

    def unload(self, name: str) -> None:
        """Forget a name. Requests that have the adapter go on with it.

        Raises:
            AdapterError: no adapter has this name.
        """
        if self._adapters.pop(name, None) is None:
            raise AdapterError(f"adapter {name}: not loaded, expected one of {', '.join(sorted(self._adapters))}")

    def loaded(self) -> Mapping[str, Adapter]:
        """Return the adapters by name."""
        return dict(self._adapters)
