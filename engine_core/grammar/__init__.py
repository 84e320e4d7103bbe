"""What an output must follow: grammars checked and compiled, automata that walk the tokens, masks. No torch."""
