"""What chats have beside text: tools, and answers in parts."""
