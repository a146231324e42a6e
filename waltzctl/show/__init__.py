"""How results look: every noun's columns declared once, and every form that a person or a program may want of them."""
