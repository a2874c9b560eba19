"""What is run beside the scripts: text prepared, runs side by side, operations beside libraries, figures, profiles."""
