"""What the program did and when, measured without disturbing it; nothing here draws a screen."""
