//! The chains as CollectiveX writes them: a document of one case with one row, for its tables.
//!
//! Its keys are those of `docs/methodology.md` of `experimental/CollectiveX` in the repository
//! SemiAnalysisAI/InferenceX, of August 2026. Figures that we do not take as it does are marked
//! unavailable: isolated calls and round trips. What follows from them is absent.

use serde_json::{Value, json};
use sidelane_testkit::timing::stats::Percentiles;

use super::chain::ChainReport;
use super::report::{Lanes, Report};
use super::run_settings::{ReceiveKind, RunSettings, Shape};
use crate::command_frame::Program;

/// Most tokens of a rank that they call decode.
const DECODE: u32 = 512;

/// The document; empty without chains.
pub fn document(report: &Report) -> String {
    report.chain.as_ref().map_or(String::new(), |chain| format!("{:#}\n", case(report, chain)))
}

fn case(report: &Report, chain: &ChainReport) -> Value {
    let config = &report.config.config;
    let RunSettings { nodes, tokens, top_k, experts, .. } = *config;
    let Shape { hidden, layout, sum_order, .. } = config.shape;
    let (ranks, per_node, routing) = (config.ranks(), config.ranks_per_node[0], config.routing.to_string());
    let Lanes { intra_node, inter_node, .. } = &report.lanes;
    let transport = [intra_node.as_deref(), inter_node.as_deref()].into_iter().flatten().collect::<Vec<_>>();
    let phase = if tokens <= DECODE { "decode" } else { "prefill" };
    let mode = if config.receive.mode == ReceiveKind::Slots { "low-latency" } else { "normal" };
    let (payload, wire) = match layout.is_per_rank() {
        true => ("token-rank", "rank-deduplicated"),
        false => ("token-expert", "per-assignment"),
    };
    let workload = match (hidden, top_k, experts) {
        (7168, 8, 256) => "deepseek-v3".to_owned(),
        _ => format!("h{hidden}-e{experts}-k{top_k}"),
    };
    let factors = ["cpu", "sidelane", &workload, mode, phase, &format!("ep{ranks}"), &routing, "bf16"];
    let topology = json!({
        "gpus_per_node": per_node, "nodes": nodes, "world_size": ranks, "placement": "packed",
        "scale_up_domain": per_node, "scope": if nodes == 1 { "scale-up" } else { "scale-out" },
        "scale_up_transport": intra_node, "scale_out_transport": inter_node,
        "transport": transport.join("-"), "topology_class": "cpu", "device_product": null,
    });
    let mut scheduled = topology.clone();
    let shape = json!({
        "backend": "sidelane", "suite": "ep-core", "workload": workload, "routing": routing,
        "ep": ranks, "experts": experts, "topk": top_k, "hidden": hidden,
        "mode": mode, "phase": phase, "precision": "bf16", "ladder": tokens.to_string(),
    });
    if let (Value::Object(scheduled), Value::Object(shape)) = (&mut scheduled, shape) {
        scheduled.extend(shape);
    }
    let (passed, samples, all) =
        (report.verdict.verified, chain.samples(), u64::from(ranks) * u64::from(tokens));
    let Program { version, commit, .. } = Program::HERE;
    let row = json!({
        "tokens_per_rank": tokens, "global_tokens": all,
        "routing": {}, "logical_copies": { "assignments": all * u64::from(top_k), "wire": wire },
        "components": {
            "combine": unavailable(), "dispatch": unavailable(),
            "isolated_sum": unavailable(), "roundtrip": unavailable(),
            "pair_period": component(chain.pair, samples, "chained-median"),
            "stage": component(chain.experts, samples, "chained-median"),
        },
        "chain_floor_us": {
            "combine": component(chain.combine_least, samples, "chained-cross-rank-min"),
            "dispatch": component(chain.dispatch_least, samples, "chained-cross-rank-min"),
        },
        "chain_health": {
            "interpair_gap_us": component(chain.gap, chain.chains, "measured"),
            "pair_spread_us": component(chain.spread, samples, "measured"),
        },
        "correctness": {
            "chain_last_output_passed": chain.verified,
            "chain_last_output_error": chain.verified.then_some(0.0),
            "post_chain_state_passed": passed, "passed": passed,
            "max_relative_error": passed.then_some(0.0),
        },
    });
    json!({
        "version": 1, "record_type": "case-attempt",
        "identity": {
            "allocation_factors": { "run_attempt": null, "run_id": null, "source_sha": commit },
            "attempt_ordinal": 1,
            "case_factors": { "case": scheduled, "sku": "cpu" },
            "case_id": factors.map(slug).join("-"),
        },
        "workload": {
            "cross_rank_consistent": true,
            "ladder_measured": [tokens], "ladder_dropped": [], "ladder_cap": null,
        },
        "measurement": {
            "combine_dtype": "bf16", "dispatch_dtype": "bf16",
            "combine_semantics": "activation-only", "payload_unit": payload, "rows": [row],
            "sampling": {
                "chain_drop": chain.fill, "chain_iterations_per_trial": chain.pairs,
                "chain_trials": chain.chains,
            },
        },
        "implementation": {
            "name": "sidelane", "library_version": version, "maturity": "candidate",
            "combine_reduction": sum_order.name(), "chained_period": true,
            "stage_excluded_from_roundtrip": false, "fp8_consume": null, "kernel_generation": null,
        },
        "topology": topology,
        "runtime": { "framework": format!("sidelane {version}") },
        "provenance": { "image": null, "source_sha": commit },
        "outcome": {
            "status": if passed { "success" } else { "invalid" },
            "reasons": if passed { vec![] } else { vec!["results are not those of the reference"] },
        },
    })
}

fn component(of: Percentiles, samples: usize, origin: &str) -> Value {
    let Percentiles { p50_us, p90_us, p95_us, p99_us } = of;
    json!({
        "availability": "measured", "origin": origin, "sample_count": samples,
        "percentiles_us": { "p50": p50_us, "p90": p90_us, "p95": p95_us, "p99": p99_us },
    })
}

fn unavailable() -> Value {
    json!({ "availability": "unavailable", "origin": null, "percentiles_us": null, "sample_count": 0 })
}

/// Letters and digits in lower case, with one hyphen for all between.
fn slug(words: &str) -> String {
    let words = words.to_lowercase();
    let parts = words.split(|c: char| !c.is_ascii_alphanumeric()).filter(|part| !part.is_empty());
    parts.collect::<Vec<_>>().join("-")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::bench::report::tests::sample;

    #[test]
    fn a_case_is_named_by_its_factors() {
        let document: Value = serde_json::from_str(&document(&sample())).unwrap();
        let name = "cpu-sidelane-h2048-e64-k8-normal-decode-ep8-zipf-1-0-bf16";
        assert_eq!(document["identity"]["case_id"], name);
        assert_eq!(document["identity"]["case_factors"]["case"]["transport"], "shm-loopback");
    }

    #[test]
    fn a_wrong_result_makes_an_invalid_case() {
        let mut report = sample();
        report.verdict.verified = false;
        let document: Value = serde_json::from_str(&document(&report)).unwrap();
        assert_eq!(document["outcome"]["status"], "invalid");
        let correctness = &document["measurement"]["rows"][0]["correctness"];
        assert_eq!(
            (&correctness["passed"], &correctness["max_relative_error"]),
            (&json!(false), &Value::Null)
        );
    }
}
