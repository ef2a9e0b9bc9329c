"""The pagestream command: serve, generate, chat, bench, doctor."""
