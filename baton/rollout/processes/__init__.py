"""Engine processes on this machine, combined into one worker transport."""
