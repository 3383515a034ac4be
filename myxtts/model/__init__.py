"""The XTTS network: pure modules that know no device, file, tokenizer or logger."""
