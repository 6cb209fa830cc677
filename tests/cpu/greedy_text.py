"""How many prompts of text the server tests ask, how long they are, and how far they are continued."""

NEW_TOKENS = 16
LENGTHS = [1, 2, 3, 5, 8, 17, 33, 40, 63, 64, 65, 100, 127, 128, 129, 180, 250, 300, 384, 500, 600, 700, 777, 900]
