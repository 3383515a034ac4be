"""MyXTTS: the XTTS trainer that never lets a GPU wait."""

__version__ = "0.1.0"
