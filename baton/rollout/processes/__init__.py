"""Engine processes of this machine behind one worker transport."""
