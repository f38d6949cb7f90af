"""Write small random models of several architectures, each a Hugging Face snapshot, into a folder.

    python tiny_models.py FOLDER

Eight heads and four KV heads, so that TP 1, 2 and 4 all divide them, each of 32 dimensions, the
fewest that vLLM's attention takes on a CPU; a vocabulary that vLLM has to pad; a tokenizer trained
on a paragraph, so that an engine can be asked something.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    OPTConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

_TEXT = "the quick brown fox jumps over the lazy dog while seven wizards watch from a high tower"
_SIZES: dict[str, Any] = {"vocab_size": 500, "hidden_size": 256, "max_position_embeddings": 512}
_LLAMA_LIKE: dict[str, Any] = {
    **_SIZES,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
CONFIGS = {
    "llama": LlamaConfig(**_LLAMA_LIKE, tie_word_embeddings=False),
    "opt": OPTConfig(
        **_SIZES,
        ffn_dim=128,
        num_hidden_layers=2,
        num_attention_heads=8,
        word_embed_proj_dim=256,
    ),
    # Biases on q, k and v, and tied embeddings.
    "qwen2": Qwen2Config(**_LLAMA_LIKE, tie_word_embeddings=True),
    "gemma": GemmaConfig(**_LLAMA_LIKE, head_dim=32),
    "gpt_neox": GPTNeoXConfig(
        **_SIZES, intermediate_size=128, num_hidden_layers=2, num_attention_heads=8
    ),
    "gpt2": GPT2Config(vocab_size=500, n_embd=256, n_layer=2, n_head=8, n_positions=512),
}


def tokenizer() -> PreTrainedTokenizerFast:
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.train_from_iterator(
        [_TEXT],
        trainers.BpeTrainer(
            vocab_size=500,
            special_tokens=["<unk>", "<s>", "</s>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=trained, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def main(folder: Path) -> None:
    words = tokenizer()
    for number, (name, config) in enumerate(CONFIGS.items()):
        torch.manual_seed(number)
        config.bos_token_id, config.eos_token_id, config.pad_token_id = 1, 2, 2
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        # Biases and norms start as zeros and ones: equal slices would hide a wrong one.
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.02)
        model.save_pretrained(folder / name)
        words.save_pretrained(folder / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
