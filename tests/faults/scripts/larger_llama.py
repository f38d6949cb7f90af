"""Write a random Llama of 19 MB, which an S3 store takes in more than one part: FOLDER."""

import sys
from pathlib import Path

import tiny_models  # pyright: ignore[reportMissingImports]
import torch
from transformers import AutoModelForCausalLM

if __name__ == "__main__":
    config = tiny_models.CONFIGS["llama"]
    config.intermediate_size = 6144
    config.bos_token_id, config.eos_token_id, config.pad_token_id = 1, 2, 2
    torch.manual_seed(0)
    folder = Path(sys.argv[1])
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    tiny_models.tokenizer().save_pretrained(folder)
