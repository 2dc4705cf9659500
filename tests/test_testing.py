"""The checks of fedjax_pfl.testing: each planted mistake is answered by a sentence that
says which rule and where."""

import functools
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toy

from fedjax_pfl import (
    averaging,
    evaluation,
    keys,
    local_training,
    losses,
    simulate,
    testing,
    traffic,
    trees,
    uploads,
)
from fedjax_pfl.algorithms import ALGORITHMS, template
from fedjax_pfl.algorithms.find import find
from fedjax_pfl.averaging import predictor
from fedjax_pfl.errors import InputError
from fedjax_pfl.testing import ContractViolation
from fedjax_pfl.types import Algorithm, Metrics, Own, State, Upload

KEY = jax.random.key(0)


def planted(mistake):
    """FedAvg with a table of the clients' last losses at the server, and one
    mistake."""

    def factory(task, *, lam: float = 0.5):
        split = averaging.split(task)
        if mistake == "python branch" and lam > 1:
            lam = 1.0

        def loss(variables, batch, key):
            mask = None if mistake == "unmasked norm" else batch.mask
            logits, stats = task.model.apply(variables, batch.x, mask=mask, train=True)
            if mistake == "unmasked loss":
                return jnp.mean(
                    optax.softmax_cross_entropy_with_integer_labels(logits, batch.y)
                ), stats
            return losses.cross_entropy(logits, batch.y, batch.mask), stats

        def init(key):
            shared, own = split.send(task.model.init(key))
            if mistake == "statistics travel":
                shared, own = (
                    trees.merge(shared, own),
                    jax.tree.map(lambda x: None, own),
                )
            weak = 0.0 if mistake == "weak type" else jnp.float32(0)
            server = {
                "w": shared,
                "table": jnp.zeros(task.num_clients),
                "scale": jnp.asarray(weak),
            }
            rows = {"own": own, "last": jnp.float32(0)}
            if mistake == "a weight that never learns":
                rows["alpha"] = jnp.float32(0.5)
            return State(server, trees.replicate(rows, task.num_clients))

        def round(key, state, cohort):
            server = state.server

            def client(c, mine):
                w = split.receive(server["w"], mine["own"])
                w, value = local_training.sgd(c.key, c.train, loss, w, task)
                if mistake == "a key of its own beside":
                    value += jax.random.normal(jax.random.key(0))
                if mistake == "a key of the module":
                    value += jax.random.normal(KEY)
                if mistake == "reads padding":
                    value += jnp.sum(c.train.examples.y[c.train.index])
                if mistake == "divides by no examples":
                    value /= c.class_counts[0]
                if mistake == "a mean over padding":
                    value /= c.train.index.shape[0]
                if mistake == "chooses by the test score":
                    score = evaluation.client(c, predictor(task.model, w))["acc"]
                    w["head"] = optax.tree.scale(score, w["head"])
                if mistake == "a weight that never learns":
                    value *= mine["alpha"]
                predict = predictor(task.model, w)
                post = (
                    evaluation.client(c, predict)
                    if mistake == "always scored"
                    else evaluation.post(cohort, c, predict)
                )
                post = {} if mistake == "no post" else post
                shared, own = split.send(w)
                if mistake == "statistics travel":
                    shared, own = w, mine["own"]
                upload = (
                    shared["head"] if mistake == "upload unlike default" else shared
                )
                return upload, {**mine, "own": own, "last": value}, value, post

            w, (mine, value, post) = cohort.mean(
                client, state.clients, weight=cohort.sizes, default=server["w"]
            )
            if mistake == "same phase":
                cohort.map(lambda c: jax.random.normal(c.key))
            if mistake == "rows of the inactive":
                change = 1 + jnp.max(state.clients["last"])
                w = w | {"head": optax.tree.scale(change, w["head"])}
            if mistake == "a Python branch on the round" and cohort.round > 0:
                w = server["w"]
            if mistake == "counts places":
                share = jnp.where(
                    jnp.any(cohort.trained),
                    jnp.sum(cohort.trained) / len(cohort.ids),
                    1,
                )
                w = w | {"head": jax.tree.map(lambda x: x * share, w["head"])}
            if mistake == "order":
                w = w | {"head": jax.tree.map(lambda x: x * (1 + value[0]), w["head"])}
            if mistake == "server decays":
                w = jax.tree.map(lambda x: x * (1 - 0.1 * lam), w)
            if mistake == "random":
                w = w | {"head": jax.tree.map(lambda x: x + _random(), w["head"])}
            ids = (
                cohort.ids
                if mistake == "absent"
                else jnp.where(cohort.trained, cohort.ids, task.num_clients)
            )
            if mistake == "rows by place":
                ids = jnp.arange(len(ids))
            table = server["table"].at[ids].set(lam * value, mode="drop")
            new = {"w": w, "table": table, "scale": server["scale"]}
            if mistake == "state grows":
                new["table"] = jnp.append(table, 0.0)
            if mistake == "lifted":
                new["w"] = optax.tree.scale(jnp.float32(1) * lam / lam, w)
            metrics = Metrics(None if mistake == "no loss" else value, post)
            if mistake == "metric":
                metrics = metrics._replace(clients={"drift": table[:2]})
            return State(new, mine), metrics

        def predict(server, mine, c):
            w = split.receive(server["w"], mine["own"])
            if mistake == "fine-tunes on test examples":
                w, _ = local_training.sgd(
                    keys.fold(c.key, keys.Client.FINE_TUNE), c.test, loss, w, task
                )
            found = predictor(task.model, w)
            if mistake == "predicts with a key of its own":
                noise = jax.random.normal(jax.random.key(1))
                return lambda x, mask: found(x, mask) + noise
            return found

        def sent(state, cohort, metrics):
            found = traffic.both_ways(cohort, state.server["w"])
            if mistake == "traffic":
                return found._replace(up=jnp.sum(found.up))
            return (
                found._replace(down=0 * found.down + 7)
                if mistake == "traffic of the inactive"
                else found
            )

        changes = {
            "signature of predict": {"predict": lambda server, c: None},
            "headline": {"headline": ("f1", "max")},
            "only architecture": {"one_architecture": False},  # but it uses task.model
        }
        return Algorithm(
            init, round, predict, evaluation.classification, sent
        )._replace(**changes.get(mistake, {}))

    return factory


def _random():
    draw = np.random.default_rng().normal
    return jax.pure_callback(
        lambda: np.float32(draw()), jax.ShapeDtypeStruct((), jnp.float32)
    )


@pytest.mark.slow  # as of every method in test_contract.py
def test_without_a_mistake_every_rule_holds():
    testing.check_algorithm(planted(None))


def test_the_rules_that_were_checked_are_returned(monkeypatch):
    def rule(s):
        """Nothing is
        wrong."""

    monkeypatch.setattr(testing, "RULES", {"order": rule, "grouping": rule})
    found = {"order": "Nothing is wrong."}
    assert testing.check_algorithm(planted(None)) == found
    assert testing.check_algorithm("lg_fedavg") == found | {"grouping": found["order"]}


@pytest.mark.slow  # the method of the README passes in test_readme.py
def test_a_copy_of_the_template_outside_of_the_package_passes(tmp_path):
    copy = shutil.copy(Path(template.__file__), tmp_path / "own.py")
    factory = find(f"{copy}:small_head")
    assert factory is not template.small_head
    testing.check_algorithm(factory)


BROKEN = {
    "unmasked loss": ("mask", r"server\['table'\] is .* in place of"),
    "rows of the inactive": ("inactive", r"server\['w'\]\['head'\]"),
    "reads padding": ("padding", r"server\['table'\]|clients\['last'\]"),
    "rows by place": ("order", r"server\['table'\]"),
    "divides by no examples": ("inactive", "is not finite"),
    "a mean over padding": ("layout", r"server\['table'\]|clients\['last'\]"),
    "a weight that never learns": ("absent", r"clients\['alpha'\] changes for no"),
    "a key of its own beside": ("key", "`round` makes a key of its own"),
    "a key of the module": ("key", "`round` makes a key of its own"),
    "predicts with a key of its own": ("key", "`predict` makes a key of its own"),
    "chooses by the test score": ("held_out", r"server\['w'\]"),
    "order": ("order", r"server\['w'\]\['head'\]"),
    "absent": ("inactive", r"server\['table'\]"),
    "unmasked norm": ("bn_stats", "masked rows"),
    "statistics travel": ("bn_stats", r"server\['w'\]\['stats'\]\['mark'\]\['mean'\]"),
    "counts places": ("layout", r"server\['w'\]\['head'\]"),
    "server decays": ("nobody", r"server\['w'\]"),
    "random": ("order", r"server\['w'\]\['head'\]"),
    "always scored": ("scores", r"post\['acc'\] is scored though"),
    "traffic of the inactive": ("inactive", "traffic.down is not 0"),
    "weak type": ("dtype", r"\['scale'\] has a weak type"),
    "fine-tunes on test examples": ("held_out", "`predict` reads c.test"),
    "only architecture": (
        "grouping",
        "needs clients of one architecture",
    ),
    "lifted": ("dtype", r"\['body'\].* must be bfloat16.*, got float32"),
}

# Their rules have a mistake that is found faster, or other tests of the methods see
# what they do.
SLOW = (
    "rows of the inactive",
    "divides by no examples",
    "a mean over padding",
    "a key of the module",
    "predicts with a key of its own",
    "chooses by the test score",
    "traffic of the inactive",
    "random",
    "unmasked norm",
    "fine-tunes on test examples",
)
SLOW += (
    "counts places",
    "only architecture",
    "lifted",
    "weak type",
    "always scored",
)
SLOW += ("statistics travel",)


@pytest.mark.parametrize("mistake", ["a Python branch on the round", "python branch"])
def test_a_python_branch_on_a_traced_value_is_an_error(mistake):
    with pytest.raises(InputError, match="needs the value of a traced array"):
        testing.check_algorithm(planted(mistake))


@pytest.mark.parametrize(
    "mistake", [toy.slow(name) if name in SLOW else name for name in BROKEN]
)
def test_a_broken_rule_is_named_with_its_place(mistake):
    rule, where = BROKEN[mistake]
    with pytest.raises(
        ContractViolation, match=f"^factory breaks the rule '{rule}' (.|\n)*{where}"
    ):
        if rule == "bn_stats":  # alone: it compiles a round of its own
            testing.check(
                rule,
                testing.subject(
                    planted(mistake), testing.task(), start=State(None, None)
                ),
            )
        testing.check_algorithm(planted(mistake))


@pytest.mark.slow  # compiles rounds of two groupings; so does the next
def test_a_result_that_depends_on_the_grouping():
    def factory(task):
        made = toy.written_out(ALGORITHMS["lg_fedavg"](task), task)
        made = made._replace(one_architecture=False)

        def round(key, state, cohort):
            new, metrics = made.round(key, state, cohort)
            return new._replace(
                server=optax.tree.scale(1 + len(task.models), new.server)
            ), metrics

        return made._replace(round=round)

    with pytest.raises(ContractViolation, match=r"'grouping' (.|\n)*server"):
        testing.check("grouping", testing.subject(factory, testing.task()))


@pytest.mark.slow
def test_a_method_for_one_network_that_says_it_takes_several():
    """One architecture declared twice is as one, and two that differ are refused."""

    def factory(task):
        split = averaging.split(task, ("body",))

        def round(key, state, cohort):
            def client(c, own):
                w = split.receive(state.server, own)
                w, value = local_training.sgd(
                    c.key, c.train, losses.classification(c.model), w, task
                )
                head, own = split.send(w)  # without c.architecture
                return (
                    head,
                    Own(own),
                    value,
                    evaluation.post(cohort, c, predictor(c.model, w)),
                )

            head, (own, value, post) = cohort.mean(
                client, state.clients, weight=cohort.sizes, default=state.server
            )
            return State(head, own), Metrics(value, post)

        def predict(server, own, c):
            return predictor(c.model, split.receive(server, own))

        return Algorithm(
            split.init,
            round,
            predict,
            evaluation.classification,
            one_architecture=False,
            traffic=lambda *given: traffic.both_ways(given[-2], 0),
        )

    made = testing.subject(factory, testing.task())
    testing.check("grouping", made)
    # an error of the method's own code is raised as it is
    with pytest.raises(ValueError, match="different numbers of pytree children"):
        testing.check("several_architectures", made)


def test_a_method_without_a_mean_says_what_it_sends():
    def round(made, key, state, cohort):
        nothing = cohort.map(lambda c: jnp.zeros(()), phase=None)
        return state, Metrics(nothing, {"acc": nothing})

    simulate.program(
        changed(round=round, traffic=lambda *_: traffic.both_ways(_[-2], 0)),
        testing.task(),
    )
    with pytest.raises(InputError, match="Algorithm must count its own `traffic`"):
        simulate.program(changed(round=round, traffic=None), testing.task())


def test_a_task_that_is_not_the_synthetic_one():
    with pytest.raises(InputError, match=r"needs a Task made by testing\.task"):
        testing.check_algorithm(ALGORITHMS["fedavg"], testing.task(sizes=np.full(5, 3)))


def test_traffic_counts_an_array_per_client():
    cohort = SimpleNamespace(active=jnp.array([True, False, True]))
    sent = traffic.both_ways(cohort, jnp.array([25, 25, 25]), {"w": jnp.zeros((43, 3))})
    np.testing.assert_array_equal(sent.down, [25, 0, 25])
    np.testing.assert_array_equal(sent.up, [129, 0, 129])
    np.testing.assert_array_equal(sent.messages, [2, 0, 2])


REFUSED = {
    "same phase": "must have its own `phase`, got 0 twice",
    "metric": ("the metric 'drift' must have one number per client, [5], got [2]"),
    "state grows": (
        "keep the state's structure and types: .server['table'] must be float32[5], "
        "got float32[6]"
    ),
    "no loss": "Metrics must have `loss`",
    "no post": "Metrics must have `loss`, the mean training loss per client [S], and `post`",
    "upload unlike default": "the upload must be like `default`: ['body']",
    "headline": "the scores must have the headline 'f1' and no name with a slash",
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_what_the_engine_refuses(mistake):
    with pytest.raises(InputError, match=re.escape(REFUSED[mistake])):
        testing.check_algorithm(planted(mistake))


def changed(**functions):
    """FedAvg with other functions, each of (FedAvg's Algorithm, its arguments...), or
    other values."""

    def factory(task):
        made = toy.written_out(ALGORITHMS["fedavg"](task), task)
        given = {
            name: functools.partial(f, made) if callable(f) else f
            for name, f in functions.items()
        }
        return made._replace(**given)

    return factory


def reporting(**fields):
    """A round of FedAvg with other fields of Metrics."""

    def round(made, key, state, cohort):
        new, metrics = made.round(key, state, cohort)
        return new, metrics._replace(**fields)

    return {"round": round}


FIELDS = {
    "tuple": (
        {"init": lambda made, key: tuple(made.init(key))},
        "must return State(server, clients), got tuple.",
    ),
    "None": (
        {"init": lambda made, key: None},
        "must return State(server, clients), got NoneType.",
    ),
    "text": (
        {"init": lambda made, key: State({"w": "text"}, {})},
        ".server['w'] must be an array, got str",
    ),
    "row": (
        {"init": lambda made, key: State({}, {"h": jnp.zeros(3)})},
        "clients['h'] of `init` must have the leading axis [5]",
    ),
    "statistic": (
        {
            "score": lambda made, *given: (
                made.score(*given) | {"f1/std": made.score(*given)["acc"]}
            )
        },
        "no name with a slash, got acc",
    ),
    "headline": (
        reporting(post={"f1": jnp.zeros(5)}),
        "the scores must have the headline 'acc'",
    ),
    "metric": (
        reporting(post={"acc": jnp.zeros(5), "f1/micro": jnp.zeros(5)}),
        "no name with a slash, got acc, f1/micro",
    ),
    "point": (reporting(server={"val/acc": jnp.zeros(())}), "it is reserved"),
}


@pytest.mark.parametrize("mistake", FIELDS)
def test_a_field_or_a_state_that_cannot_be(mistake):
    fields, said = FIELDS[mistake]
    with pytest.raises(InputError, match=re.escape(said)):
        simulate.program(changed(**fields), testing.task())


def failing(where):
    """FedAvg written out, with one mistake that Python or JAX reports."""

    def factory(task, *, mu: float = 0.5):
        if where == "factory":
            mu = mu if mu < 1 else 1.0
        plain = losses.classification(task.model)

        def loss(variables, batch, key):
            branch = where == "branch" and mu > 0
            return None if branch else plain(variables, batch, key)

        def round(key, state, cohort):
            def client(c):
                w, value = local_training.sgd(c.key, c.train, loss, state.server, task)
                return w if where == "no tuple" else (w, value)

            of = {"weight": cohort.sizes[:3], "one weight": jnp.ones(1)}
            weight = of.get(where, cohort.sizes)
            w, value = cohort.mean(client, weight=weight, default=state.server)
            return State(w, state.clients), Metrics(value, {"acc": value})

        made = toy.written_out(ALGORITHMS["fedavg"](task), task)
        return made._replace(round=round)

    return factory


BRANCH = (
    r"\(TracerBoolConversionError\): float hyperparameters are traced; .*int or Literal"
)
FAILS = {
    "factory": ("its factory", BRANCH),
    "branch": ("round", BRANCH),
}


@pytest.mark.parametrize("where", FAILS)
def test_what_the_users_code_raises_is_one_sentence_with_its_line(where):
    part, why = FAILS[where]
    with pytest.raises(
        InputError, match=rf"^factory needs the value of a traced array in {part} {why}"
    ) as caught:
        simulate.program(failing(where), testing.task())
    assert caught.value.__cause__ is not None


GIVEN = {
    "weight": ("the `weight` of cohort.mean must have one entry per client, [5], got"),
    "one weight": (
        "the `weight` of cohort.mean must have one entry per client, [5], got"
    ),
    "no tuple": "the function given to cohort.mean must return a tuple (upload, ...), got dict.",
}


@pytest.mark.parametrize("where", GIVEN)
def test_what_is_given_to_the_mean(where):
    with pytest.raises(InputError, match=f"^factory: {re.escape(GIVEN[where])}"):
        simulate.program(failing(where), testing.task())


def test_one_number_that_is_not_finite_makes_its_row_so():
    found = trees.finite(
        {
            "a": jnp.array([[1.0, jnp.nan], [1, 1], [1, 1]]),
            "b": jnp.ones(3),
            "n": jnp.arange(3),
        },
        3,
    )
    np.testing.assert_array_equal(found, [False, True, True])


def everybody(**more):
    """Returns a cohort of all clients."""
    return toy.cohort(toy.task(), range(toy.N), **more)


@pytest.mark.parametrize(
    "option",
    [uploads.top_k(0.3), toy.slow(uploads.low_rank(1)), toy.slow(uploads.qsgd(4))],
)
def test_an_option_on_uploads_passes(option):
    testing.check_upload(option)


def test_an_option_with_a_key_of_its_own_is_named():
    def client(c, update, server, row):
        drawn = jax.random.uniform(jax.random.key(1))
        return jax.tree.map(lambda x: x + drawn, update), row, ()

    with pytest.raises(testing.ContractViolation, match="breaks the rule 'key'"):
        testing.check_upload(Upload(lambda like: ((), ()), client))
    with pytest.raises(InputError, match="takes no options on uploads"):
        testing.check_upload(uploads.top_k(0.3), "fedamp")


def averaged(client=None, **fields):
    """FedAvg's Method with another function of a client, (FedAvg's, its arguments...),
    or other fields."""

    def factory(task, *, lam: float = 0.5):
        made = ALGORITHMS["fedavg"](task)
        more = {} if client is None else {"client": functools.partial(client, made)}
        return made._replace(**fields | more)

    return factory


def test_a_part_that_is_sent_untrained_is_named():
    def client(made, c, server, row):
        update = made.client(c, server, row)
        return update._replace(upload=update.upload | {"head": server["head"]})

    with pytest.raises(ContractViolation, match=r"'means' .*server\['head'\]"):
        testing.check("means", testing.subject(averaged(client), testing.task()))


def test_averages_are_of_the_server():
    with pytest.raises(InputError, match="did you mean 'body'"):
        simulate.program(averaged(averages=("bodi",)), testing.task())


def test_a_number_that_changes_nothing_is_warned_of(monkeypatch):
    monkeypatch.setattr(testing, "RULES", {})
    with pytest.warns(UserWarning, match="no result depends on `lam`"):
        testing.check_algorithm(averaged())


def test_an_error_of_the_methods_own_code_names_the_rule():
    s = testing.subject(averaged(), testing.task())
    failing = s._replace(round=lambda *given: jnp.zeros(2) + jnp.zeros(3))
    with pytest.raises(TypeError) as found:
        testing.check("order", failing)
    assert "in the rule 'order'" in found.value.__notes__[-1]
