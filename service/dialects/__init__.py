"""Other APIs than chat completions, as conversations for the one path behind them all."""
