"""Other servers of the OpenAI API that answer for some of this node's names."""
