"""When two pictures, or two sentences, are one: the rules of every door that data comes in by."""
