"""What runs when: slots, the queue, admission, plans and their results. No torch, no clock, no sockets."""
