"""What reports mean: state machines and pictures, without Lightning and without communication."""
