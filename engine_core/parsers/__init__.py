"""What a model wrote, taken apart: reasoning, tool calls and the rest. Machines without input or output of their own.

Each takes text as it comes and gives pieces; how the text is cut changes nothing but the cuts between pieces. What does
not parse is content. What is held back is bounded.
"""
