"""Loading of the engine, in the process and on the thread that step it; and what is known of models before that."""

from collections.abc import Callable

from pagestream_engine.config import EngineConfig
from pagestream_engine.engine import Engine
from pagestream_engine.errors import ConfigError, EngineError, ModelError, ModelNotFound, UnsupportedModel
from pagestream_engine.models.folder import model_revision, resolve_model
from pagestream_engine.models.tokenizer import load_tokenizer

from pagestream_worker.collector import spare_what_lives
from pagestream_worker.stepping.reports import ModelFacts, ModelInspected

EngineFactory = Callable[[str, EngineConfig], Engine]
"""Makes an engine from a model and settings; picklable where the engine gets a process of its own."""


def load_engine(make_engine: EngineFactory, model: str, config: EngineConfig) -> Engine:
    """Load the model.

    Raises:
        EngineError: the model can't be loaded with these settings.
    """
    engine = make_engine(model, config)
    spare_what_lives()
    return engine


def inspect_model(source: str, config: EngineConfig, *, is_deterministic: bool) -> ModelInspected:
    """Read configuration, tokenizer and headers, and no tensor.

    Args:
        source: the model's folder or repository.
        config: that it would be loaded with.
        is_deterministic: whether the engine that would load it computes so now.
    """
    from pagestream_engine.models.select import open_model  # needs torch

    try:
        folder = resolve_model(source)
        load_tokenizer(folder)
        model = open_model(folder)
        model.check_files()
        longest = max(model.info.max_position_embeddings, model.info.extended_context)
        context = config.model.max_model_len or model.info.max_position_embeddings
        if context > longest:
            raise UnsupportedModel(f"max_model_len: given {context}, expected at most {longest}, which {source} has")
        facts = ModelFacts(
            max_model_len=context,
            vocab_size=model.info.vocab_size,
            eos_token_ids=frozenset(model.info.eos_token_ids),
            is_deterministic=is_deterministic and model.can_be_deterministic,
            pooled_size=model.pooled_size,
            revision=model_revision(folder),
            takes_adapters=config.adapters.enable_lora,
        )
    except EngineError as error:
        return ModelInspected(source, None, str(error), is_permanent=is_permanent(error))
    except Exception as error:  # noqa: BLE001 - a file of another model must not end the engine that runs
        return ModelInspected(source, None, f"{source}: {type(error).__name__}: {error}")
    return ModelInspected(source, facts)


def is_permanent(error: EngineError) -> bool:
    """Return whether files or options are at fault, so that no later attempt can succeed with the same ones.

    A file that can't be read, a repository that can't be reached and a machine without memory may be well again.
    """
    if isinstance(error, ModelNotFound):
        return error.__cause__ is None  # else the repository was asked for, in vain
    cause = error.__cause__ or error.__context__
    is_storage = isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError)
    return isinstance(error, ModelError | ConfigError) and not is_storage
