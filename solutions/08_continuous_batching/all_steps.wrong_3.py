def all_steps(
    requests: list[tuple[str, int, int]], seats: int, budget: int, regions: int
) -> list[list[tuple[str, int, int]]]:
    """Forget that each request needs a region."""
    waiting = list(requests)
    running: list[dict] = []
    steps: list[list[tuple[str, int, int]]] = []
    while waiting or running:
        left, step = budget, []
        for one in running:
            n = min(one["tokens"] - one["computed"], left)
            if n > 0:
                step.append((one["name"], one["computed"], n))
                one["computed"] += n
                left -= n
        while waiting and left > 0 and len(running) < seats:
            name, prompt, output = waiting.pop(0)
            n = min(prompt, left)
            step.append((name, 0, n))
            left -= n
            running.append(
                {
                    "name": name,
                    "tokens": prompt,
                    "computed": n,
                    "to_go": output,
                }
            )
        computed = {name for name, _, _ in step}
        for one in running:
            if one["name"] in computed and one["computed"] == one["tokens"]:
                one["tokens"] += 1
                one["to_go"] -= 1
        running = [one for one in running if one["to_go"] > 0]
        steps.append(step)
    return steps
