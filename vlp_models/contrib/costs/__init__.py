"""What each stage costs: processor time, memory, bytes and energy; `vlp costs`, the report, cards, `vlp history`."""
