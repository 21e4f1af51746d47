import itertools

import pytest
import torch
from plane_builders import model
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from services.weights.layout import check_same, check_whole, flat_bytes, lay_out, views


def specs_of(named, **kwargs):
    return [laid.spec for laid in lay_out(named, **kwargs)]


def test_the_layout_is_aligned_and_does_not_overlap():
    specs = specs_of(model(0))
    assert [s.name for s in specs] == list(model(0))
    assert all(s.offset % 64 == 0 for s in specs)
    assert all(a.offset + a.nbytes <= b.offset for a, b in itertools.pairwise(specs))
    assert specs[1].dtype == "bfloat16"
    assert specs[0].nbytes == 100 * 30 * 4
    assert flat_bytes(specs) == specs[-1].offset + specs[-1].nbytes
    assert (specs[0].full_shape, specs[0].start, specs[3].start) == ((100, 30), (0, 0), ())


def test_tied_tensors_are_stored_once_and_slices_of_one_storage_are_not_tied():
    embedding = torch.nn.Embedding(10, 4)
    head = torch.nn.Linear(4, 10, bias=False)
    head.weight = embedding.weight
    net = torch.nn.ModuleDict({"embedding": embedding, "head": head})
    assert [s.name for s in specs_of(net.state_dict())] == ["embedding.weight"]
    flat = torch.zeros(20)
    assert [s.name for s in specs_of({"a": flat[:10], "b": flat[10:]})] == ["a", "b"]


def test_views_share_the_flat_buffer():
    specs = specs_of(model(0))
    flat = torch.zeros(flat_bytes(specs), dtype=torch.uint8)
    views(flat, specs)["weight"].fill_(1.0)
    assert flat.any()


def test_a_published_type_is_that_of_floating_tensors_only():
    specs = {s.name: s for s in specs_of(model(0), dtype=torch.bfloat16)}
    assert {s.dtype for s in specs.values()} == {"bfloat16", "int64"}
    assert (specs["scalar"].dtype, specs["weight"].nbytes) == ("int64", 100 * 30 * 2)


def test_nothing_and_sparse_tensors_are_refused():
    with pytest.raises(ValueError, match="no tensor"):
        lay_out({})
    with pytest.raises(ValueError, match="dense"):
        lay_out({"a": torch.eye(3).to_sparse()})


def test_a_layout_that_differs_is_refused_with_the_difference():
    specs = specs_of(model(0))
    check_same(specs, specs_of(model(7)))
    with pytest.raises(ValueError, match=r"missing \[\('last'"):
        check_same(specs, specs_of({k: v for k, v in model(0).items() if k != "last"}))
    with pytest.raises(ValueError, match="unexpected"):
        check_same(specs, specs_of(model(0) | {"weight": torch.zeros(3)}))
    with pytest.raises(ValueError, match="order"):
        check_same(specs, specs_of(dict(reversed(model(0).items()))))


@pytest.mark.parametrize(("rows", "ranks"), [(7, 3), (2, 3), (6, 3), (1, 2), (0, 2)])
def test_the_boxes_of_all_ranks_make_the_whole_also_uneven_and_empty_ones(as_rank, rows, ranks):
    whole = torch.arange(rows * 5.0).view(rows, 5)
    found, parts = torch.full_like(whole, -1.0), []
    for rank in range(ranks):
        sharded = DTensor.from_local(
            torch.chunk(whole, ranks)[rank] if rank < len(torch.chunk(whole, ranks)) else whole[:0],
            as_rank(rank, ranks), [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride(),
        )  # fmt: skip
        (laid,) = lay_out({"w": sharded}, rank=rank)
        spec, box = laid.spec, laid.box
        assert spec.full_shape == (rows, 5)
        assert spec.shape == tuple(box.tensor.shape)
        found[spec.start[0] : spec.start[0] + spec.shape[0]] = box.tensor
        assert (spec.nbytes == 0) == (not box.grid or box.place[0] >= box.grid[0])
        parts.append([spec])
    assert torch.equal(found, whole)
    check_whole(parts)


def test_a_plain_tensor_is_laid_out_by_the_first_rank_and_a_replicated_one_by_the_first_of_its_group(as_rank):
    assert [len(lay_out({"w": torch.ones(3)}, rank=rank)) for rank in (0, 1)] == [1, 0]
    laid = []
    for rank in range(4):  # two replicas of two shards
        mesh = as_rank(rank, 2, 2)
        hybrid = DTensor.from_local(torch.ones(2, 3), mesh, [Replicate(), Shard(0)], run_check=False)
        laid.append([one.spec.start for one in lay_out({"w": hybrid}, rank=rank)])
    assert laid == [[(0, 0)], [(2, 0)], [], []]


def test_columns_of_a_tensor_are_a_box_too(as_rank):
    sharded = DTensor.from_local(torch.ones(4, 3), as_rank(1, 2), [Shard(1)], run_check=False)
    (laid,) = lay_out({"w": sharded}, rank=1)
    assert (laid.spec.full_shape, laid.spec.start) == ((4, 6), (0, 3))


def test_placements_that_are_no_box_are_refused(as_rank):
    for placements, shape in (([Partial()], (2,)), ([Shard(0), Shard(0)], (2, 2))):
        tensor = DTensor.from_local(torch.ones(4, 3), as_rank(0, *shape), placements, run_check=False)
        with pytest.raises(ValueError, match="w is placed as"):
            lay_out({"w": tensor})


def test_parts_that_do_not_make_a_whole_are_refused(as_rank):
    sharded = DTensor.from_local(torch.ones(2, 3), as_rank(0, 2), [Shard(0)], run_check=False)
    with pytest.raises(ValueError, match=r"w \(6 of 12 elements\).*one writer per rank"):
        check_whole([specs_of({"w": sharded, "plain": torch.ones(2)})])
