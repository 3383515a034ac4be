"""Speaking: text, a reference recording and a language to a wave. Trains nothing; the door is `synthesizer`."""
