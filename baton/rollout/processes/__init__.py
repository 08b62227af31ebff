"""Engine processes on this machine, which together are one worker transport."""
