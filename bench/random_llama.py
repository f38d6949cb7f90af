"""Write a random Llama in bfloat16 into FOLDER: python random_llama.py FOLDER [LAYERS].

Of 14 layers, which is the default, it has 1.5 GB; of 19, 2 GB.
"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

if __name__ == "__main__":
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=int(sys.argv[2]) if len(sys.argv) > 2 else 14,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to_empty(device="cpu").bfloat16()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02)
    model.save_pretrained(sys.argv[1], max_shard_size="500MB")
