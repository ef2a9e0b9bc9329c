from pagestream_simulator.study.tables import tables

OUTCOME = {"attainment": 0.99, "ttft_p50_s": 0.2, "ttft_p99_s": 2.0, "pod_hours": 4.0, "pods_up": 3}


def test_each_label_has_a_row_with_the_mean_and_names_missing_seeds() -> None:
    other = OUTCOME | {"attainment": 0.97, "pod_hours": 8.0}
    kept = {
        f"reference t.csv seed {seed} startup 8": {
            "requests": 10,
            "fixed": OUTCOME,
            "optimum": OUTCOME,
            "lower_bound_pod_hours": 1.0,
        }
        for seed in (0, 1)
    }
    kept |= {f"hpa tuned on t.csv: t.csv seed {seed} startup 8": each for seed, each in ((0, OUTCOME), (1, other))}
    kept |= {"pagestream default: t.csv seed 1 startup 8": OUTCOME}
    kept |= {"earlier pagestream default: t.csv seed 0 startup 8": other}
    text = "\n".join(tables(kept))
    assert "| hpa tuned on t.csv | 98.00 % (97.00 %) | 0.20 s | 2.00 s | 6.00 | 1.50 | 3 |" in text
    assert "| pagestream default (seed 1) | 99.00 % (99.00 %) |" in text
    assert "| earlier pagestream default (seed 0) | 97.00 % (97.00 %) | 0.20 s | 2.00 s | 8.00 | 2.00 | 3 |" in text
    assert "keda" not in text
