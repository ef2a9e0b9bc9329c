"""What an engine gives up, rung by rung, while blocks, host memory or Redis' memory are short."""
