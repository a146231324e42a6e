"""What analysts import. It needs the `spark` extra (pyarrow); no daemon and no tool of operators imports it."""
