"""Text in eighteen languages: which language, how it is spoken, which token ids."""
