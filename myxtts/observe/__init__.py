"""What the program did and when, measured without disturbing it; what follows from it; pages and views of it."""
