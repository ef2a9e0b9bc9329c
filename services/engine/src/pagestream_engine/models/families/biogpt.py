"""BioGPT: embeddings that are scaled, and learned ones of positions added to them."""

from __future__ import annotations

from pagestream_engine.layers.rope import RopeContext
from pagestream_engine.models.config import ConfigFile
from pagestream_engine.models.decoder import DecoderConfig, LayerConfig, read_decoder
from pagestream_engine.models.gpt import TORCH_EPS, Gpt, GptNames, in_llamas_words, with_fields, with_shape


class BioGpt(Gpt):
    """Luo et al. 2022, arXiv:2210.10341."""

    architecture = "BioGptForCausalLM"
    names = GptNames(
        embedding="biogpt.embed_tokens",
        layers="biogpt.layers.",
        attention="self_attn.",
        norm="biogpt.layer_norm",
        head="output_projection",
        input_norm="self_attn_layer_norm",
        post_norm="final_layer_norm",
        up="fc1",
        down="fc2",
        positions="biogpt.embed_positions",
    )
    first_position = 2

    def read(self, file: ConfigFile) -> DecoderConfig:
        # Its norms have torch's own eps, whatever `layer_norm_eps` says.
        file = with_fields(in_llamas_words(file, {}, hidden_act="gelu"), rms_norm_eps=TORCH_EPS)
        file = with_shape(file, file.whole("intermediate_size"))
        context = file.whole("max_position_embeddings", 1024)
        scale = file.whole("hidden_size") ** 0.5 if file.flag("scale_embedding", True) else None
        return read_decoder(
            file,
            file.info(self.architecture, RopeContext(context, context)),
            (LayerConfig(None),) * file.whole("num_hidden_layers"),
            qkv_bias=True,
            output_bias=True,
            mlp_bias=True,
            embedding_scale=scale,
            tie_word_embeddings=file.flag("tie_word_embeddings", True),
        )
