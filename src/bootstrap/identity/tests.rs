use super::*;

fn read(vars: &[(&str, &str)]) -> Result<Identity, BootstrapError> {
    Identity::from_vars(&|name| {
        vars.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
    })
}

const TORCHRUN: &[(&str, &str)] = &[
    ("RANK", "3"),
    ("WORLD_SIZE", "8"),
    ("LOCAL_RANK", "1"),
    ("LOCAL_WORLD_SIZE", "2"),
    ("MASTER_ADDR", "head"),
    ("MASTER_PORT", "29500"),
    ("TORCHELASTIC_RUN_ID", "none"),
];
const SLURM: &[(&str, &str)] = &[
    ("SLURM_PROCID", "5"),
    ("SLURM_NTASKS", "6"),
    ("SLURM_LOCALID", "1"),
    ("SLURM_NODELIST", "node[03-05,09],x1"),
    ("SLURM_JOB_ID", "77"),
    ("SLURM_STEP_ID", "0"),
];
const OMPI: &[(&str, &str)] = &[
    ("OMPI_COMM_WORLD_RANK", "1"),
    ("OMPI_COMM_WORLD_SIZE", "2"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
    ("PMIX_NAMESPACE", "prterun-1"),
];

#[test]
fn torchrun_is_met_after_its_own_port() {
    let identity = read(TORCHRUN).unwrap();
    assert_eq!((identity.rank, identity.size), (3, 8));
    assert_eq!((identity.local_rank, identity.local_size), (Some(1), Some(2)));
    assert_eq!((identity.source, identity.job.as_str()), (Launcher::Torchrun, "none@head:29500"));
    assert_eq!(identity.ports, (29501..29517).collect::<Vec<_>>());
    assert_eq!((identity.insecure, identity.launcher_pipe), (false, None));
    assert!(!identity.is_local());
}

#[test]
fn slurm_is_met_at_its_first_host_at_a_port_of_the_job() {
    let identity = read(SLURM).unwrap();
    assert_eq!(
        (identity.rank, identity.size, identity.local_rank, identity.local_size),
        (5, 6, Some(1), None)
    );
    assert_eq!((identity.source, identity.job.as_str()), (Launcher::Slurm, "slurm-77.0"));
    assert_eq!(identity.master_addr, "node03");
    assert_eq!(identity.ports.len(), 16);
    assert!(identity.ports.iter().all(|port| (20_001..32_100).contains(port)), "{:?}", identity.ports);
    assert_eq!(identity, read(SLURM).unwrap(), "the same on every rank");
    let other = read(&[SLURM, &[("SIDELANE_JOB", "mine")]].concat()).unwrap();
    assert_ne!(other.ports, identity.ports);
}

#[test]
fn the_variables_of_a_slurm_step_are_stronger_than_those_of_its_allocation() {
    let step = [
        ("SLURM_STEP_NUM_TASKS", "2"),
        ("SLURM_STEP_NODELIST", "x9"),
        ("SLURM_STEP_NUM_NODES", "1"),
        ("SLURM_PROCID", "1"),
    ];
    let identity = read(&[&step, SLURM].concat()).unwrap();
    assert_eq!((identity.size, identity.local_size, identity.master_addr.as_str()), (2, Some(2), "x9"));
    assert!(identity.is_local());
}

#[test]
fn open_mpi_meets_on_loopback_or_wants_an_address() {
    let identity = read(OMPI).unwrap();
    assert_eq!((identity.source, identity.job.as_str()), (Launcher::OpenMpi, "prterun-1"));
    assert_eq!(identity.master_addr, "127.0.0.1");
    assert!(identity.is_local());
    let wide = [&[("OMPI_COMM_WORLD_SIZE", "4")], OMPI].concat();
    assert!(matches!(read(&wide), Err(BootstrapError::MissingVariable { name: "MASTER_ADDR", .. })));
    let told = read(&[&wide[..], &[("MASTER_ADDR", "head"), ("MASTER_PORT", "4000")]].concat()).unwrap();
    assert_eq!((told.master_addr.as_str(), told.ports[0]), ("head", 4001));
}

#[test]
fn the_inner_launcher_is_right() {
    assert_eq!(read(&[TORCHRUN, SLURM].concat()).unwrap().source, Launcher::Torchrun);
    assert_eq!(read(&[OMPI, SLURM].concat()).unwrap().source, Launcher::OpenMpi);
    let ours = [TORCHRUN, SLURM, &[("SIDELANE_JOB", "j1"), ("SIDELANE_PORT", "7000")]].concat();
    let ours = read(&ours).unwrap();
    assert_eq!((ours.source, ours.job.as_str(), ours.ports), (Launcher::Sidelane, "j1", vec![7000]));
}

#[test]
fn what_cannot_be_used_is_named() {
    let bad = |change: (&'static str, &'static str)| read(&[&[change], TORCHRUN].concat());
    assert_eq!(read(&[]), Err(BootstrapError::NoEnvironment));
    for (name, value) in [
        ("RANK", "8"),
        ("RANK", "-1"),
        ("WORLD_SIZE", "0"),
        ("WORLD_SIZE", "many"),
        ("LOCAL_RANK", "2"),
        ("MASTER_PORT", "0"),
        ("MASTER_PORT", "65536"),
        ("SIDELANE_PORT", "x"),
        ("SIDELANE_LAUNCHER_FD", "-3"),
    ] {
        let seen = bad((name, value));
        assert!(
            matches!(&seen, Err(BootstrapError::BadVariable { name: n, value: v, .. }) if *n == name && v == value),
            "{name}={value}: {seen:?}"
        );
    }
    for name in ["RANK", "WORLD_SIZE", "MASTER_ADDR"] {
        let seen = bad((name, ""));
        assert!(
            matches!(&seen, Err(BootstrapError::MissingVariable { name: n, .. }) if *n == name),
            "{name}: {seen:?}"
        );
    }
    let list = read(&[&[("SLURM_NODELIST", "node[")], SLURM].concat());
    assert!(matches!(list, Err(BootstrapError::BadVariable { name: "SLURM_NODELIST", .. })));
}

#[test]
fn ports_stay_in_range_at_its_upper_end() {
    for port in ["65535", "65520", "65519", "65518"] {
        let identity = read(&[&[("MASTER_PORT", port)], TORCHRUN].concat()).unwrap();
        assert_eq!(identity.ports.len(), 16);
        assert!(!identity.ports.contains(&port.parse().unwrap()), "{port}: {:?}", identity.ports);
    }
}

#[test]
fn the_launchers_pipe_and_recklessness_are_read() {
    let vars: &[_] =
        &[("SIDELANE_LAUNCHER_FD", "9"), ("SIDELANE_LAUNCHER_PID", "123"), ("SIDELANE_INSECURE", "1")];
    let identity = read(&[vars, TORCHRUN].concat()).unwrap();
    assert_eq!((identity.launcher_pipe, identity.insecure), (Some(LauncherPipe { fd: 9, pid: 123 }), true));
}
